"""Every module that goes into a model in place of a stock one. They know tensors, and the state that is stored."""
