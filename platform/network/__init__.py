"""The network: topology and mixing weights, wire format, traffic ledger."""
