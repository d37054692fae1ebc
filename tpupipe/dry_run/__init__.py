"""The rehearsal of a production configuration on one machine: checks, a small run with a forced failure, the account."""
