"""OpenAI's Responses API: routes, writer, stored responses, truncation."""
