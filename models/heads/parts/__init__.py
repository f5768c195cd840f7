"""Parts that draft heads share: the contract, targets, losses, layers, saving and loading."""
