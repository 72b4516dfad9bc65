"""The core: owns sandbox records, their states and deadlines, API keys, and the relay to agents."""
