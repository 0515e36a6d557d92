"""The embedded Kubernetes from the command line: python -m embedded COMMAND."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from embedded import cluster
from embedded.control_plane import ControlPlane
from embedded.demo import remove_demo, run_demo
from embedded.errors import ClusterError
from embedded.images import build_images
from embedded.places import cache_dir, default_root
from embedded.progress import say
from embedded.tools import TOOLS, ensure_tools, tool_path


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; `down` removes what was started")
        return 130
    return 0


def tools(arguments: argparse.Namespace) -> None:
    ensure_tools(arguments.names or tuple(TOOLS))
    for name in arguments.names or TOOLS:
        print(tool_path(name))


def up(arguments: argparse.Namespace) -> None:
    if arguments.control_plane:
        root = arguments.root or cache_dir() / "control-plane"
        running = ControlPlane.attach(root) or ControlPlane.start(root, tied=False)
    else:
        running = cluster.ensure_cluster(arguments.root)
    say(f"kubectl is {tool_path('kubectl')}")
    print(f"export KUBECONFIG={running.kubeconfig}")


def images(arguments: argparse.Namespace) -> None:
    built = build_images()
    for image in (built.operator, built.engine):
        print(image.reference)


def demo(arguments: argparse.Namespace) -> None:
    run_demo(arguments.root)


def demo_down(arguments: argparse.Namespace) -> None:
    remove_demo(arguments.root)
    say(f"kept for the next time: {cache_dir()}")


def down(arguments: argparse.Namespace) -> None:
    roots = [arguments.root] if arguments.root else [default_root(), cache_dir() / "control-plane"]
    for root in roots:
        cluster.take_down(root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="embedded", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        return added

    add("tools", tools, "build the cluster's programs into the cache").add_argument(
        "names", nargs="*", metavar="NAME", help=f"only these of: {', '.join(TOOLS)}"
    )
    add("images", images, "build the images of the operator and the engine")
    for name, command, text in (
        ("up", up, "start a cluster, or find the running one"),
        ("down", down, "remove the cluster and all that it left on this machine"),
        ("demo", demo, "install everything, serve a model and ask it a question"),
        ("demo-down", demo_down, "remove all that `demo` made"),
    ):
        added = add(name, command, text)
        added.add_argument("--root", type=Path, help="the cluster's folder (default: in the cache)")
        if name == "up":
            kinds = added.add_mutually_exclusive_group()
            kinds.add_argument("--node", action="store_true", help="with a real node (default)")
            kinds.add_argument("--control-plane", action="store_true", help="no node, no root")
    return parser


if __name__ == "__main__":
    sys.exit(main())
