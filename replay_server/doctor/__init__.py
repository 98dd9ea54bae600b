"""What ``replay-server doctor`` looks at: everything outside this program that it needs, each with what to do where it is missing."""
