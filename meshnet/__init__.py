"""meshnet: one large language model, served from many ordinary machines."""

__version__ = "0.1.0"
