"""REST: the Fleet API's methods as JSON over HTTP, with their OpenAPI document and a stream of incidents."""
