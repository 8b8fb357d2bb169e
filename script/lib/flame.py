"""Where CPU time goes: folded stacks, a flame graph, and a table, of what `perf script` prints.

perf script -F comm,pid,ip,sym | flame.py --arm ARM --load LOAD --us US --role NAME=PID,PID...
    --folded FILE --svg FILE

US: the CPU time that one operation took, which the samples are shares of. Samples of processes
that have no role are left out. Prints one JSON object for each part, then a table.
"""

import argparse
import collections
import html
import json
import re
import sys

KERNEL = 1 << 63
WIDTH, ROW, MARGIN, LETTER = 1200, 16, 8, 6.3
# Narrower boxes are left out: nobody could see or point at them.
BOX_MIN = 1.0
COLOURS = {"application": (120, 160, 215), "client": (235, 165, 95), "server": (125, 190, 120)}
OTHER_COLOUR = (190, 190, 190)


def samples(lines):
    """(pid, frames) of each sample; frames are (name, is of the kernel), outermost first."""
    pid, frames = None, []
    for line in lines:
        words = line.split()
        if not words:
            if pid is not None:
                yield pid, frames[::-1]
            pid, frames = None, []
        elif pid is None:
            # Names of threads may have blanks in them.
            pid = int(words[-1]) if words[-1].isdigit() else -1
        else:
            name = words[1:] and " ".join(words[1:]) or "[unknown]"
            frames.append((plain(name), int(words[0], 16) & KERNEL != 0))
    if pid is not None:
        yield pid, frames[::-1]


def plain(name):
    """Without the hash that rustc adds, and without what the kernel's compiler adds."""
    name = re.sub(r"::h[0-9a-f]{16}$", "", name)
    return re.sub(r"\.(isra|constprop|part|cold)(\.\d+)*$", "", name).replace(";", ",")


def part_of(frames):
    """The system call that a sample is of, or what else it is."""
    names = [name for name, kernel in frames if kernel and name != "x64_sys_call"]
    if "do_syscall_64" in names[:-1]:
        # Its entry may have been left by a jump: then what it jumped to is named after it.
        entry = names[names.index("do_syscall_64") + 1]
        call = re.fullmatch(r"_*(?:x64_|se_|do_)?(?:k?sys|do)_(\w+)", entry)
        if call:
            return call[1]
    if names:
        return "interrupts, faults, switches"
    return "outside of the kernel"


class Node:
    def __init__(self):
        self.count, self.kernel, self.children = 0, False, {}

    def add(self, frames):
        self.count += 1
        node = self
        for name, kernel in frames:
            node = node.children.setdefault(name, Node())
            node.count += 1
            node.kernel = kernel

    def depth(self, share):
        below = [one.depth(share) for one in self.children.values() if one.count >= share]
        return 1 + max(below, default=0)


def flame_graph(root, title, us):
    """The SVG: as wide as CPU time, callers below what they call."""
    per_sample = (WIDTH - 2 * MARGIN) / max(root.count, 1)
    rows = root.depth(BOX_MIN / per_sample)
    height = (rows + 2) * ROW + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="monospace" font-size="10.5">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="{ROW}" font-size="13">{html.escape(title)}</text>',
    ]

    def box(name, node, x, row, colour):
        width = node.count * per_sample
        if width < BOX_MIN:
            return
        y = height - MARGIN - (row + 1) * ROW
        # What runs in the kernel is paler.
        fill = "#" + "".join(f"{c + (255 - c) * node.kernel // 2:02x}" for c in colour)
        shown = f"{name}: {us * node.count / root.count:.2f} us, {100 * node.count / root.count:.1f} %"
        letters = int((width - 4) / LETTER)
        out.append(
            f'<g><title>{html.escape(shown)}</title><rect x="{x:.1f}" y="{y}" '
            f'width="{width - 0.3:.1f}" height="{ROW - 1}" fill="{fill}"/>'
        )
        if letters >= 3:
            text = name if len(name) <= letters else name[: letters - 1] + "\u2026"
            out.append(f'<text x="{x + 2:.1f}" y="{y + 11}">{html.escape(text)}</text>')
        out.append("</g>")
        for child, below in sorted(node.children.items()):
            box(child, below, x, row + 1, COLOURS.get(child, OTHER_COLOUR) if row < 1 else colour)
            x += below.count * per_sample

    box("all", root, MARGIN, 0, OTHER_COLOUR)
    return "\n".join(out + ["</svg>\n"])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--arm", "--load", "--folded", "--svg"):
        parser.add_argument(name, required=True)
    parser.add_argument("--us", type=float, required=True)
    parser.add_argument("--role", action="append", default=[])
    return parser.parse_args()


def main():
    args = arguments()
    role_of = {}
    for role in args.role:
        name, pids = role.split("=", 1)
        role_of.update({int(pid): name for pid in pids.split(",") if pid})
    root, stacks, parts = Node(), collections.Counter(), collections.Counter()
    for pid, frames in samples(sys.stdin):
        role = role_of.get(pid)
        if role is None:
            continue
        root.add([(role, False), *frames])
        stacks[";".join([role, *(name for name, _ in frames)])] += 1
        parts[role, part_of(frames)] += 1
    if not root.count:
        sys.exit("perf has no sample of the processes that were to be looked at")
    with open(args.folded, "w") as file:
        file.writelines(f"{stack} {count}\n" for stack, count in sorted(stacks.items()))
    title = f"dray, {args.load}, {args.arm}: {args.us:.1f} us of CPU an operation"
    with open(args.svg, "w") as file:
        file.write(flame_graph(root, title, args.us))
    show(args, parts, root.count)


def show(args, parts, total):
    rows = [
        (role, part, args.us * count / total)
        for (role, part), count in sorted(parts.items(), key=lambda one: (one[0][0], -one[1]))
    ]
    for role, part, us in rows:
        metric = f"{args.load}.{role}.{part}"
        row = {"bench": "profile", "arm": args.arm, "metric": metric, "value": round(us, 3)}
        print(json.dumps(row | {"unit": "us"}))
    print(f"\n{'part':<44} {args.arm + ', us':>14}", file=sys.stderr)
    for role, part, us in rows:
        if us >= args.us / 200:
            print(f"{role + ': ' + part:<44} {us:14.1f}", file=sys.stderr)
    print(f"{'sum':<44} {args.us:14.1f}\n", file=sys.stderr)


main()
