"""What can go wrong with the embedded cluster.

ClusterError
├── ToolError          a program is missing or could not be built
├── MachineError       this machine lacks something that was asked for (root, a package, an address)
├── NotReached         a state was not reached by its deadline; carries what was seen instead
├── ProcessEnded       a program that should run has ended; carries the end of its log
└── CommandFailed      a command that should succeed did not; carries what it printed
"""


class ClusterError(Exception):
    """Root of all errors of the embedded cluster."""


class ToolError(ClusterError):
    pass


class MachineError(ClusterError):
    pass


class NotReached(ClusterError):
    pass


class ProcessEnded(ClusterError):
    pass


class CommandFailed(ClusterError):
    pass
