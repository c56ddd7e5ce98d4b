"""How does Offbeat compare with other libraries? docs/peers.md describes the method."""
