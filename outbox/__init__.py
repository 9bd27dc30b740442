"""The machinery of the transactional outbox: everything an adopter keeps current and does not edit."""
