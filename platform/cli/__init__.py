"""The command line: one module per command. The only package that may import every other one."""
