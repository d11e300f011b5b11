"""Versions of the weights in a folder or an object store, as full snapshots and deltas between them.

manifests/000000000012.json      written last, by the leader: a version exists when this does
parts/000000000012/NAME.DIGEST   written by the ranks; the name carries the digest, so what is there need not be
                                 sent again after a crash

   rank 0   put ─ put ─┐
   rank 1   put ─ put ─┼─ records gathered ─▶ leader: publish ─▶ readers: latest, chain, restore, update
   rank 2   put ─ put ─┘
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .blob import read_blob
from .codec import Decoded, check_array, decode, element_type
from .errors import BaseVersionError, StoreError
from .files import TEMPORARY, Files
from .manifest import Kind, Manifest, Part, from_json, to_json
from .patch import apply, fold, undo

_MANIFESTS, _PARTS = "manifests", "parts"
_REPAIR = "Publish a full version, and start from that."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What leads from a version to a later one."""

    full: Manifest | None
    """Where to begin; None where the deltas belong on what is held already."""
    deltas: tuple[Manifest, ...]
    """In the order in which they are put on."""

    @property
    def nbytes(self) -> int:
        return sum(manifest.nbytes for manifest in (*([self.full] if self.full else []), *self.deltas))


class DeltaStore:
    """Publishes versions and reads them back. One object per process; several processes may share a store.

    Args:
        url: a path, or a URL of fsspec: `memory://…`, `s3://…`, `gs://…` (their packages must be installed).
        full_every: a full version is due after this many deltas.
        filesystem: an fsspec file system to use instead of the one that `url` names.
        options: passed to that file system (keys, endpoint).
    """

    def __init__(self, url: str, *, full_every: int = 16, filesystem: Any = None, **options: Any) -> None:
        if full_every < 1:
            raise StoreError(f"`full_every` is {full_every}; a full version must come at least every 1 version.")
        self.url = url
        """As it was given."""
        self._files = Files(url, filesystem=filesystem, **options)
        self._full_every = full_every

    # ---- writing

    def kind_for(self, version: int, *, base: int | None) -> tuple[Kind, str]:
        """What to publish `version` as, given the version that the deltas at hand would be based on, and why.

        Raises:
            StoreError: this version or a later one is published.
        """
        versions = self.versions()
        if not versions:
            return "full", "the store is empty"
        if version <= versions[-1]:
            raise StoreError(_too_old(version, versions[-1]))
        if base != versions[-1]:
            return "full", f"the newest stored version is {versions[-1]}, not the base {base}"
        try:
            deltas = len(self.chain(None, versions[-1]).deltas)
        except StoreError as error:
            return "full", f"what is stored cannot be read ({error})"
        if deltas >= self._full_every:
            return "full", f"{deltas} deltas follow the last full version"
        return "delta", f"delta {deltas + 1} of at most {self._full_every} after a full version"

    def put_full(self, version: int, name: str, array: np.ndarray) -> Part:
        """Write one array of a full version; returns its record, for `publish`.

        Args:
            array: [N] uint8, uint16 or uint32, contiguous.
        """
        check_array(array, name)
        data = memoryview(array.view(np.uint8).data)
        return self._put(version, name, data, dtype=array.dtype.name, count=array.size)

    def put_delta(self, version: int, name: str, blob: bytes) -> Part:
        """Write the delta of one array; returns its record, for `publish`."""
        about = read_blob(blob)
        return self._put(version, name, memoryview(blob), dtype=element_type(about).name, count=about.count)

    def publish(
        self,
        version: int,
        parts: Iterable[Part],
        *,
        kind: Kind,
        base: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Make `version` visible, once every rank has put its parts. Doing it again with the same parts is harmless.

        Raises:
            BaseVersionError: the base of a delta is not the newest version in the store.
            StoreError: the version is not newer than what is there, a part is missing or of the wrong size, parts
                differ from the base's, or the manifest cannot be written.
        """
        ordered = tuple(sorted(parts, key=lambda part: part.name))
        manifest = Manifest(version=version, kind=kind, base=base, parts=ordered, metadata=dict(metadata or {}))
        versions = self.versions()
        if version in versions:
            return self._published_already(manifest)
        newest = versions[-1] if versions else None
        if newest is not None and version < newest:
            raise StoreError(_too_old(version, newest))
        if base is not None:
            self._check_base(manifest, newest)
        for part in ordered:
            if (size := self._files.size(part.file)) != part.nbytes:
                has = "is missing" if size is None else f"has {size} bytes instead of {part.nbytes}"
                raise StoreError(f"{part.file} {has}; version {version} is not published. Put the part again.")
        try:
            self._files.write(_manifest_path(version), to_json(manifest), exclusive=True)
        except FileExistsError:
            return self._published_already(manifest)
        return manifest

    def prune(self, *, keep_fulls: int = 1) -> list[int]:
        """Remove what comes before the newest `keep_fulls` full versions, and parts of versions never published.

        What the chain from the newest full version needs always stays, and so does what is newer than every version
        published: ranks may be writing it.

        Returns:
            The versions removed.
        """
        if keep_fulls < 1:
            raise StoreError(f"`keep_fulls` is {keep_fulls}; the newest full version must stay.")
        versions = self.versions()
        manifests = self._readable(versions)
        fulls = [version for version in versions if version in manifests and manifests[version].kind == "full"]
        if not fulls:
            return []
        first = fulls[-keep_fulls:][0]
        gone = [version for version in versions if version < first]
        for version in gone:
            self._files.remove(_manifest_path(version))  # before its parts: a version that is seen is whole
        for folder in self._files.names(_PARTS):
            version = int(folder) if folder.isdigit() else versions[-1] + 1
            if version < first or (version <= versions[-1] and version not in versions):
                self._files.remove(f"{_PARTS}/{folder}")
            elif version in manifests:
                self._remove_strays(manifests[version], folder)
        for name in self._files.names(_MANIFESTS):
            if name.endswith(TEMPORARY) and int(name.partition(".")[0]) <= versions[-1]:
                self._files.remove(f"{_MANIFESTS}/{name}")
        return gone

    def forget(self, version: int) -> None:
        """Remove parts of versions that were never published, but for those of `version`, which it may still use.

        For whoever writes alone: a full disk must not stay full of what a failed push left.
        """
        newest = self.latest()
        for folder in self._files.names(_PARTS):
            if folder.isdigit() and int(folder) != version and (newest is None or int(folder) > newest):
                self._files.remove(f"{_PARTS}/{folder}")

    # ---- reading

    def versions(self) -> list[int]:
        """Published versions, ascending."""
        found = (re.fullmatch(r"(\d+)\.json", name) for name in self._files.names(_MANIFESTS))
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int | None:
        """The newest published version."""
        return versions[-1] if (versions := self.versions()) else None

    def manifest(self, version: int) -> Manifest:
        """What `version` consists of.

        Raises:
            StoreError: it is not published, or its manifest is damaged.
        """
        path = _manifest_path(version)
        try:
            found = from_json(self._files.read(path), path=path)
            if found.version != version:
                raise StoreError(f"{path} is the manifest of version {found.version}. Publish a full version.")
            return found
        except FileNotFoundError:
            have = self.versions()
            raise StoreError(f"Version {version} is not in the store, which has {have[:1]} to {have[-1:]}.") from None

    def identity(self, version: int) -> str:
        """xxh3-128 of a version's manifest: tells versions of the same number apart where a store was emptied.

        Raises:
            StoreError: it is not published.
        """
        try:
            return xxhash.xxh3_128_hexdigest(self._files.read(_manifest_path(version)))
        except FileNotFoundError:
            raise StoreError(f"Version {version} is not in the store.") from None

    def chain(self, from_version: int | None, to_version: int) -> Chain:
        """The shortest way to `to_version`: deltas alone if they lead there from `from_version`, else from a full one.

        Raises:
            StoreError: a version on the way is missing or damaged.
        """
        deltas = list[Manifest]()
        at = to_version
        while True:
            if at == from_version:
                return Chain(full=None, deltas=tuple(reversed(deltas)))
            manifest = self.manifest(at)
            if manifest.base is None:
                return Chain(full=manifest, deltas=tuple(reversed(deltas)))
            deltas.append(manifest)
            at = manifest.base

    def read(self, manifest: Manifest, name: str) -> bytes:
        """The bytes of one part: elements of a full version, or the blob of a delta.

        Raises:
            StoreError: its file is missing, short, or damaged; the message names it.
        """
        part = manifest.part(name)
        try:
            data = self._files.read(part.file)
        except FileNotFoundError:
            raise StoreError(f"{part.file} is missing. If it was pruned, ask for the chain again.") from None
        if len(data) != part.nbytes:
            raise StoreError(f"{part.file} is torn: {len(data)} bytes instead of {part.nbytes}. {_REPAIR}")
        if xxhash.xxh3_128_hexdigest(data) != part.digest:
            raise StoreError(f"{part.file} was damaged: its digest differs. {_REPAIR}")
        return data

    def restore(self, chain: Chain, name: str) -> np.ndarray:
        """The array of one part at the end of a chain that begins with a full version.

        Raises:
            StoreError: a file is missing or damaged, or the chain has no full version.
        """
        if chain.full is None:
            raise StoreError("This chain begins at a version that is held already; use `update`.")
        part = chain.full.part(name)
        array = np.frombuffer(bytearray(self.read(chain.full, name)), part.dtype)
        self.update(array, chain, name, holds=chain.full.version)
        return array

    def update(self, array: np.ndarray, chain: Chain, name: str, *, holds: int) -> None:
        """Put the deltas of a chain on `array`, in place. Where this raises, `array` is as before.

        Args:
            holds: the version that `array` is of.

        Raises:
            BaseVersionError: the first delta belongs on another version.
            DeltaError: the values are not those of that version.
        """
        done = list[Decoded]()
        try:
            for manifest in chain.deltas:
                if manifest.base != holds:
                    raise _wrong_base(manifest, holds)
                done.append(decode(self.read(manifest, name), old=array))
                apply(array, done[-1])
                holds = manifest.version
        except BaseException:
            for delta in reversed(done):
                undo(array, delta)
            raise

    def folded(self, chain: Chain, name: str, *, old: np.ndarray | None = None) -> Decoded:
        """The deltas of a chain as one.

        Args:
            old: the values that the first one belongs on, which `small` deltas need; it is not changed.
        """
        running = None if old is None else old.copy()
        parts = list[Decoded]()
        for manifest in chain.deltas:
            parts.append(decode(self.read(manifest, name), old=running))
            if running is not None:
                apply(running, parts[-1])
        return fold(parts)

    # ---- inside

    def _put(self, version: int, name: str, data: memoryview, *, dtype: str, count: int) -> Part:
        digest = xxhash.xxh3_128_hexdigest(data)
        file = f"{_folder(version)}/{_file_name(name)}.{digest}"
        if not self._files.holds(file, nbytes=len(data), digest=digest):
            self._files.write(file, data)
        return Part(name=name, file=file, nbytes=len(data), digest=digest, dtype=dtype, count=count)

    def _published_already(self, manifest: Manifest) -> Manifest:
        there = self.manifest(manifest.version)
        if there != manifest:
            raise StoreError(
                f"Version {manifest.version} was published already, with other contents. Publish a later one."
            )
        return there

    def _check_base(self, manifest: Manifest, newest: int | None) -> None:
        if manifest.base != newest or newest is None:
            raise _wrong_base(manifest, newest)
        base = {part.name: (part.dtype, part.count) for part in self.manifest(newest).parts}
        ours = {part.name: (part.dtype, part.count) for part in manifest.parts}
        odd = sorted(name for name in base.keys() | ours.keys() if base.get(name) != ours.get(name))
        if odd:
            raise StoreError(
                f"{len(odd)} parts of version {manifest.version} do not fit its base {newest}, the first {odd[0]}: "
                f"{ours.get(odd[0])} on {base.get(odd[0])}. Publish a full version."
            )

    def _readable(self, versions: Iterable[int]) -> dict[int, Manifest]:
        found = dict[int, Manifest]()
        for version in versions:
            with contextlib.suppress(StoreError):
                found[version] = self.manifest(version)
        return found

    def _remove_strays(self, manifest: Manifest, folder: str) -> None:
        """Parts of earlier attempts at a version that was published in the end."""
        ours = {part.file for part in manifest.parts}
        for name in self._files.names(f"{_PARTS}/{folder}"):
            if f"{_PARTS}/{folder}/{name}" not in ours:
                self._files.remove(f"{_PARTS}/{folder}/{name}")


def _wrong_base(manifest: Manifest, holds: int | None) -> BaseVersionError:
    held = "nothing is" if holds is None else f"version {holds} is"
    return BaseVersionError(
        f"Delta {manifest.version} belongs on version {manifest.base}, but {held} there. "
        "Take the chain from the version that is held, or a full version."
    )


def _too_old(version: int, newest: int) -> str:
    return f"Version {version} cannot follow version {newest}, which is published. Publish a later one."


def _manifest_path(version: int) -> str:
    return f"{_MANIFESTS}/{version:012d}.json"


def _folder(version: int) -> str:
    return f"{_PARTS}/{version:012d}"


def _file_name(name: str) -> str:
    """`name` as one component of a path, whatever it is; the digest of the whole name tells clashes apart."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:80]
    return f"{plain}-{xxhash.xxh3_64_hexdigest(name.encode())}"
