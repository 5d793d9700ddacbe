"""From a source and operations to a verified, recorded, published output."""
