"""The network: topology and mixing weights, wire format (packet, codecs), traffic ledger."""
