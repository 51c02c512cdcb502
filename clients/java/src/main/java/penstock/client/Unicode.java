package penstock.client;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import java.util.List;
import java.util.Map;

/**
 * Rejects texts that cannot be encoded in UTF-8. Protobuf would send an unpaired surrogate as a
 * question mark, and log a stack trace.
 */
final class Unicode {
  private Unicode() {}

  /**
   * Checks all strings of a request.
   *
   * @throws IllegalArgumentException which names the field by its path in the request
   */
  static void require(Message request) {
    require(request, "");
  }

  private static void require(Message message, String prefix) {
    for (Map.Entry<FieldDescriptor, Object> each : message.getAllFields().entrySet()) {
      FieldDescriptor field = each.getKey();
      String path = prefix + field.getName();
      if (!field.isRepeated()) {
        requireValue(each.getValue(), path);
        continue;
      }
      FieldDescriptor.JavaType type = field.getJavaType();
      if (type != FieldDescriptor.JavaType.STRING && type != FieldDescriptor.JavaType.MESSAGE) {
        continue;  // Token ids are not checked, because there are many.
      }
      List<?> values = (List<?>) each.getValue();
      for (int index = 0; index < values.size(); index++) {
        requireValue(values.get(index), path + "[" + index + "]");
      }
    }
  }

  private static void requireValue(Object value, String path) {
    if (value instanceof Message message) {
      require(message, path + ".");
    } else if (value instanceof String text && hasHalfPair(text)) {
      // The text is not quoted, because prompts may be private.
      throw new IllegalArgumentException(path + ": has an unpaired surrogate");
    }
  }

  private static boolean hasHalfPair(String text) {
    for (int index = 0; index < text.length(); index++) {
      char unit = text.charAt(index);
      if (!Character.isSurrogate(unit)) {
        continue;
      }
      boolean isPair = Character.isHighSurrogate(unit) && index + 1 < text.length()
          && Character.isLowSurrogate(text.charAt(index + 1));
      if (!isPair) {
        return true;
      }
      index++;
    }
    return false;
  }
}
