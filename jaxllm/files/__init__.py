"""Reads files from elsewhere within limits, and writes files that are either whole or absent."""
