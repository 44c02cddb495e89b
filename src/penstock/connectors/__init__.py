"""Source connectors: the contract of `penstock.contracts.connector`, over captures."""
