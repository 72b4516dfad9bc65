"""The edge: translates E2B REST, Connect and file transfer into gRPC. Holds no state that matters."""
