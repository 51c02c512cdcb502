package penstock.conformance;

import java.util.Map;
import java.util.stream.Collectors;

/** Writes one flat object of strings. */
final class Json {
  private Json() {}

  static String object(Map<String, String> fields) {
    return fields.entrySet()
        .stream()
        .map(field -> quoted(field.getKey()) + ": " + quoted(field.getValue()))
        .collect(Collectors.joining(", ", "{", "}"));
  }

  private static String quoted(String text) {
    StringBuilder quoted = new StringBuilder("\"");
    for (char character : text.toCharArray()) {
      boolean isPlain = character >= ' ' && character < 127;
      if (isPlain && character != '"' && character != '\\') {
        quoted.append(character);
      } else {
        quoted.append("\\u%04x".formatted((int) character));
      }
    }
    return quoted.append('"').toString();
  }
}
