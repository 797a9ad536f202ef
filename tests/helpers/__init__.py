"""What several tests share: tiny models, references, and what every test runs under."""
