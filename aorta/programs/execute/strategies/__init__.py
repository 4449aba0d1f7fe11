"""Ways of putting a collective beside a matrix multiply, all with the same operands and the same outcome."""
