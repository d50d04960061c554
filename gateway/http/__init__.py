"""What every answer of the gateway needs, whatever API it belongs to."""
