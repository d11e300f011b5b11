"use strict";
(() => {
  const tip = document.getElementById("tip");

  function show(event, rows, title) {
    tip.replaceChildren();
    const head = document.createElement("strong");
    head.textContent = title;
    tip.append(head);
    for (const [name, value, colour] of rows) {
      const row = document.createElement("div");
      const label = document.createElement("span");
      label.textContent = name;
      if (colour) label.className = "c" + colour;
      const text = document.createElement("b");
      text.textContent = value;
      row.append(label, text);
      tip.append(row);
    }
    tip.classList.add("on");
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth;
    const below = event.clientY + 18 + box.height > innerHeight;
    tip.style.left = Math.max(4, right ? event.clientX - box.width - 12 : event.clientX + 16) + "px";
    tip.style.top = Math.max(4, below ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
  }

  function hide() {
    tip.classList.remove("on");
  }

  for (const figure of document.querySelectorAll("[data-chart]")) {
    const data = JSON.parse(figure.dataset.chart);
    const plot = figure.querySelector(".over") ?? figure.querySelector("svg");
    const cursor = figure.querySelector(".cursor");
    const move = (event) => {
      const box = plot.getBoundingClientRect();
      const at = (100 * (event.clientX - box.left)) / box.width;
      let i = 0;
      data.left.forEach((left, j) => {
        if (Math.abs(left - at) < Math.abs(data.left[i] - at)) i = j;
      });
      cursor.style.left = data.left[i] + "%";
      cursor.classList.add("on");
      show(event, data.series.map((s) => [s.name, s.values[i], s.colour]), data.what + data.step[i]);
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", () => {
      cursor.classList.remove("on");
      hide();
    });
  }

  const token = (event) => {
    const cell = event.target.closest(".t[data-t]");
    if (!cell) return hide();
    const [id, logprob, version] = cell.dataset.t.split("|");
    const rows = [["id", id]];
    if (logprob !== undefined) {
      rows.push(["log-prob", logprob], ["probability", Math.exp(+logprob).toPrecision(3)], ["weights", version]);
    }
    show(event, rows, JSON.stringify(cell.textContent.replace(/⏎\n/g, "\n")));
  };
  for (const strip of document.querySelectorAll(".strip")) {
    strip.addEventListener("pointerover", token);
    strip.addEventListener("pointerdown", token);
    strip.addEventListener("pointerleave", hide);
  }

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
