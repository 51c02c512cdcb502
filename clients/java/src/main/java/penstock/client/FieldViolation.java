package penstock.client;

/**
 * One bad field of a request.
 *
 * @param field its path, such as {@code sampling.temperature}
 * @param description what is wrong with it, for people
 */
public record FieldViolation(String field, String description) {}
