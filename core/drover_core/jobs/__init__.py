"""Why a job died or hangs: its logs, its ranks' dumps, its nodes' errors. Pure: bytes and events in, a verdict out."""
