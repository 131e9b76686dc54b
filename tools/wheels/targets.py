"""The platforms that get a wheel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A platform: its names in the words of wheels, zig, Python and pip, and how its programs run here."""

    name: str
    tag: str  # the wheel's platform tag
    zig: str  # the compiler's target; its version names the oldest glibc or macOS
    platform: str  # sysconfig.get_platform() of the target's Python
    numpy: tuple[str, ...]  # platform tags of NumPy's wheels that have the right headers
    emulator: tuple[str, ...] | None  # runs its programs; None: this machine cannot

    @property
    def machine(self) -> str:
        """x86_64 or aarch64."""
        return self.zig.partition("-")[0]

    @property
    def system(self) -> str:
        """Linux, macos or windows."""
        return self.zig.split("-")[1].partition(".")[0]


def _linux(machine: str, libc: str, emulator: tuple[str, ...]) -> Target:
    tag, zig = {"gnu": ("manylinux_2_17", "gnu.2.17"), "musl": ("musllinux_1_2", "musl")}[libc]
    return Target(
        name=f"{tag.partition('_')[0]}_{machine}",
        tag=f"{tag}_{machine}",
        zig=f"{machine}-linux-{zig}",
        platform=f"linux-{machine}",
        numpy=(f"manylinux_2_28_{machine}", f"manylinux2014_{machine}")
        if libc == "gnu"
        else (f"musllinux_1_2_{machine}",),
        emulator=emulator,
    )


def _macos(machine: str, zig: str, version: str) -> Target:
    return Target(
        name=f"macos_{machine}",
        tag=f"macosx_{version.replace('.', '_')}_{machine}",
        zig=f"{zig}-macos.{version}",
        platform=f"macosx-{version}-{machine}",
        numpy=(f"macosx_14_0_{machine}",),
        emulator=None,
    )


def _windows(machine: str, zig: str, emulator: tuple[str, ...] | None) -> Target:
    return Target(
        name=f"windows_{machine}",
        tag=f"win_{machine}",
        zig=f"{zig}-windows-gnu",
        platform=f"win-{machine}",
        numpy=(f"win_{machine}",),
        emulator=emulator,
    )


TARGETS = [
    _linux("x86_64", "gnu", ()),
    _linux("x86_64", "musl", ()),
    _linux("aarch64", "gnu", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
    _linux("aarch64", "musl", ("qemu-aarch64",)),
    _macos("arm64", "aarch64", "11.0"),
    _macos("x86_64", "x86_64", "10.13"),
    _windows("amd64", "x86_64", ("wine64",)),
    _windows("arm64", "aarch64", None),
]
