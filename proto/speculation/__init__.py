"""The contract between engines and the sidecar; its sources are the .proto files in here."""
