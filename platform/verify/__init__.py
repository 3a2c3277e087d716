"""Verification: closed-form certificates and contract checks of algorithms."""
