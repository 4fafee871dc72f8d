"""Agent loops as verl runs them, under the names that its users know."""
