"""The agent: the only part that touches a sandbox's processes and files. Needs grpcio and protobuf and nothing else."""

__all__ = ["__version__"]

__version__ = "0.1.0"
