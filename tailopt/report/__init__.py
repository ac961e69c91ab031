"""What people look at: terminal tables and machine-readable rows."""
