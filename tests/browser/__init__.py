"""The page in a real Chromium: what people see, and what hostile texts must not do."""
