"""What training adds for heads: the parts of `HeadPenalty`, one a file."""
