package penstock.client;

/**
 * One invalid field of a request.
 *
 * @param field its path, such as {@code sampling.temperature}
 * @param description the reason, for humans
 */
public record FieldViolation(String field, String description) {}
