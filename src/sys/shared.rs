//! Memory shared between connection threads, or between processes, as files in memory.
