"""The decoding engine: the drafter contract, tree growth, sampling, acceptance rules, and the one loop."""
