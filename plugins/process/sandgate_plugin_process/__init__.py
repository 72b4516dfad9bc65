"""The process backend: sandboxes are Linux processes behind bubblewrap, or plain ones when asked for by name."""
