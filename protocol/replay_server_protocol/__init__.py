"""What client and server agree on: schema, messages, shared segments, states, errors and names. Knows neither side's sockets or devices."""
