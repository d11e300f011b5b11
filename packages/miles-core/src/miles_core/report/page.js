"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  /** An element with its class and children; strings become text, never markup. */
  function make(tag, name, ...children) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...children);
    return element;
  }

  /** An SVG that stretches to its box. Each shape is [class, path]. */
  function canvas(width, height, label, shapes) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const attributes = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" };
    for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
    svg.setAttribute("aria-label", label);
    for (const [name, d] of shapes) {
      const path = document.createElementNS(svg.namespaceURI, "path");
      path.setAttribute("class", name);
      path.setAttribute("d", d);
      svg.append(path);
    }
    return svg;
  }

  /** A label at a place of its parent, in percent. */
  function label(name, text, side, place) {
    const span = make("span", name, text);
    span.style[side] = place + "%";
    return span;
  }

  /** Short and readable: 0.53, 41.2, 1.2k, 3.4M, 3.1e-6; as `format_number` in page.py. */
  function short(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e9) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
    const [unit, letter] = size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
    const text = (value / unit).toPrecision(size >= 1000 && size < 1e4 ? 4 : 3);
    return (text.includes("e") ? (value / unit).toFixed(0) : String(Number(text))) + letter;
  }

  // ---- what the pointer shows

  function show(event, rows, title) {
    const lines = rows.map(([name, value, colour]) => [make("span", colour ? "c" + colour : "", name), make("b", "", value)]);
    tip.replaceChildren(make("strong", "", title), ...lines.map((line) => make("div", "", ...line)));
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

  /** The index of the number that is nearest. */
  function nearest(numbers, at) {
    let best = 0;
    numbers.forEach((number, i) => {
      if (Math.abs(number - at) < Math.abs(numbers[best] - at)) best = i;
    });
    return best;
  }

  /** Follow the pointer over `plot`: a line at the nearest of `places`, in percent, and `read(index)` beside it. */
  function follow(plot, cursor, places, read) {
    const move = (event) => {
      const box = plot.getBoundingClientRect();
      const i = nearest(places, (100 * (event.clientX - box.left)) / box.width);
      cursor.style.left = places[i] + "%";
      cursor.classList.add("on");
      show(event, ...read(i));
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", () => {
      cursor.classList.remove("on");
      hide();
    });
  }

  // ---- charts, in a square of 1000 by 1000

  const path = (points) => points.map(([x, y], i) => (i ? "L" : "M") + x + " " + y).join("");
  const round = (value) => Math.round(10 * value) / 10;

  function drawChart(chart) {
    for (const series of chart.series) series.colour ??= 1;
    const caption = make("figcaption", "", make("h3", "", chart.title), make("p", "", chart.note));
    if (chart.series.length > 1 || chart.series.some((series) => series.low)) {
      caption.append(make("ul", "", ...chart.series.map((series) => make("li", "c" + series.colour, series.name))));
    }
    const figure = make("figure", "chart " + (chart.size ?? "normal"), caption);
    if (!chart.y_axis) {
      figure.append(make("p", "nothing", "not measured"));
      return figure;
    }
    const [left, right, steps] = chart.x_axis;
    const [bottom, top, levels] = chart.y_axis;
    const scale = chart.log ? (value) => Math.log10(Math.max(value, bottom)) : (value) => value;
    const x = (value) => round((1000 * (value - left)) / (right - left));
    const y = (value) => round(1000 - (1000 * (scale(value) - scale(bottom))) / (scale(top) - scale(bottom)));
    const shapes = [["grid", levels.map((tick) => `M0 ${y(tick)}H1000`).join("")]];
    (chart.layout ? drawLayers : drawLines)(chart, x, y, shapes);
    const plot = make("div", "plot");
    for (const tick of levels) plot.append(label("y", short(tick), "top", y(tick) / 10));
    for (const tick of steps) plot.append(label("x", short(tick), "left", x(tick) / 10));
    if (chart.limit) {
      const [value, name] = chart.limit;
      shapes.push(["limit", `M0 ${y(value)}H1000`]);
      plot.append(label("limit-name", name, "top", y(value) / 10));
    }
    const svg = canvas(1000, 1000, chart.title, shapes);
    const cursor = make("div", "cursor");
    plot.append(svg, cursor);
    const places = [...new Set(chart.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const read = (i) => [
      chart.series.map((s) => [s.name, short(valueAt(s, places[i])) + (chart.unit ?? ""), s.colour]),
      `${chart.x_name ?? "step"} ${places[i]}`,
    ];
    follow(svg, cursor, places.map((place) => x(place) / 10), read);
    figure.append(plot);
    return figure;
  }

  /** The value of a series at x, on the straight line between its neighbours; null where it has not begun or is over. */
  function valueAt(series, x) {
    const exact = series.x.indexOf(x);
    if (exact >= 0) return series.values[exact];
    const after = series.x.findIndex((place) => place > x);
    if (after <= 0 || series.kind === "points") return null;
    const [left, right] = [series.x[after - 1], series.x[after]];
    const [a, b] = [series.values[after - 1], series.values[after]];
    return a === null || b === null ? null : a + ((b - a) * (x - left)) / (right - left);
  }

  /** Lines through all known values, which are often logged only every few steps; their intervals lie below. */
  function drawLines(chart, x, y, shapes) {
    const isKnown = (value) => value !== null && !(chart.log && value <= 0);
    const points = (series, values) => values.flatMap((v, i) => (isKnown(v) ? [[x(series.x[i]), y(v)]] : []));
    for (const series of chart.series.filter((one) => one.low)) {
      const [lower, upper] = [points(series, series.low), points(series, series.high)];
      const bars = lower.map(([place, low], i) => `M${place} ${low}V${upper[i][1]}`).join("");
      if (series.kind === "points") shapes.push(["error c" + series.colour, bars]);
      else if (upper.length) shapes.push(["band c" + series.colour, path([...upper, ...lower.reverse()]) + "Z"]);
    }
    for (const series of chart.series) {
      const known = points(series, series.values);
      shapes.push(["line c" + series.colour, path(known)]);
      const dots = known.map(([place, value]) => `M${place} ${value}h0`).join("");
      if (series.kind === "points" || series.x.length === 1) shapes.push(["dot c" + series.colour, dots]);
    }
  }

  /** Layers that are added up, as areas or as bars; a gap is a layer of height 0. */
  function drawLayers(chart, x, y, shapes) {
    const places = chart.series[0].x;
    const between = places.slice(1).map((place, i) => (places[i] + place) / 2);
    const edges = [chart.x_axis[0], ...between, chart.x_axis[1]].map(x);
    const gap = round(Math.min(100 / places.length, 4));
    let level = places.map(() => 0);
    for (const series of chart.series) {
      const bottom = level;
      const top = bottom.map((base, i) => base + (series.values[i] ?? 0));
      level = top;
      const line = (values) => values.map((value, i) => [x(places[i]), y(value)]);
      const bar = (i) => `M${edges[i] + gap} ${y(bottom[i])}V${y(top[i])}H${edges[i + 1] - gap}V${y(bottom[i])}Z`;
      const bars = () => places.map((_, i) => (top[i] > bottom[i] ? bar(i) : "")).join("");
      const d = chart.layout === "bars" ? bars() : path([...line(top), ...line(bottom).reverse()]) + "Z";
      shapes.push(["area c" + series.colour, d]);
    }
  }

  // ---- timeline: one row a lane, one column a bin

  function drawTimeline(figure, { lanes, marks, ticks, after }) {
    const bins = after.length;
    const rows = lanes.map((lane) => {
      const levels = lane.heat.map((heat) => Math.ceil(6 * heat - 1e-6) || (heat > 0 ? 1 : 0));
      const cells = (level) => levels.map((one, i) => (one === level ? `M${i} 0h1v1h-1Z` : "")).join("");
      const shapes = [1, 2, 3, 4, 5, 6].map((level) => ["h" + level, cells(level)]);
      return make("div", "lane", make("span", "", lane.name), canvas(bins, 1, lane.name, shapes));
    });
    const lines = marks.map((mark) => {
      const line = label("mark" + (mark.is_rewind ? " back" : ""), "", "left", 100 * mark.at);
      line.title = mark.text;
      return line;
    });
    const cursor = make("div", "cursor");
    const over = make("div", "over", cursor);
    figure.append(make("div", "lanes", ...rows, over, make("div", "marks", ...lines)));
    figure.append(make("div", "ticks", ...ticks.map((tick) => make("span", "", tick))));
    const text = ({ heat, peak }, i) => {
      if (peak === null) return Math.round(100 * heat[i]) + "%";
      const groups = (heat[i] * peak).toFixed(1);
      return groups === "0.0" ? "idle" : groups + " groups";
    };
    const places = after.map((_, i) => (100 * (i + 0.5)) / bins);
    follow(over, cursor, places, (i) => [lanes.map((lane) => [lane.name, text(lane, i)]), "after " + after[i]]);
  }

  // ---- conversations, token by token

  function drawStrip(strip, blocks) {
    const tokens = new Map();
    let version = "";
    for (const { author, items } of blocks) {
      const line = make("p");
      for (const item of items) {
        if (typeof item === "number") line.append(make("b", "cut", `… ${item} tokens left out …`));
        else if (typeof item === "string") line.append(make("b", "v", (version = item)));
        else {
          const [id, text, logprob, level] = item;
          const special = text.startsWith("<|") && /\|>(⏎\n)*$/.test(text) ? " special" : "";
          const token = make("i", "t" + (level === undefined ? "" : " l" + level) + special, text);
          const facts = [["id", String(id)]];
          if (level !== undefined) {
            const p = Math.exp(logprob).toPrecision(3);
            facts.push(["log-prob", logprob.toFixed(4)], ["probability", p], ["weights", version]);
          }
          tokens.set(token, facts);
          line.append(token);
        }
      }
      strip.append(make("div", "turn " + author, make("span", "who", author), line));
    }
    const look = (event) => {
      const rows = tokens.get(event.target);
      if (rows) show(event, rows, JSON.stringify(event.target.textContent.replace(/⏎\n/g, "\n")));
      else hide();
    };
    strip.addEventListener("pointerover", look);
    strip.addEventListener("pointerdown", look);
    strip.addEventListener("pointerleave", hide);
  }

  for (const group of document.querySelectorAll("[data-charts]")) {
    group.append(...data.charts[group.dataset.charts].map(drawChart));
  }
  for (const figure of document.querySelectorAll(".timeline")) drawTimeline(figure, data.timeline);
  document.querySelectorAll(".strip").forEach((strip, i) => drawStrip(strip, data.strips[i]));
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  });
})();
