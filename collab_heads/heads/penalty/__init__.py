"""Terms that training adds to the loss for heads: the parts of `HeadPenalty`, each in one file."""
