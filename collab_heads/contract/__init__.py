"""The contract between the package and a model family: adapters, and the registry that finds them."""
