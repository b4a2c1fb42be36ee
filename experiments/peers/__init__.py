"""servax beside what users would pick instead, on the same work and the same machine."""
