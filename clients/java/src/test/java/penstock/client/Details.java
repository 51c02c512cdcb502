package penstock.client;

import com.google.protobuf.Any;
import com.google.protobuf.MessageLite;

/** Packs google.rpc details under their type names. */
final class Details {
  private Details() {}

  static Any packed(String name, MessageLite detail) {
    return Any.newBuilder()
        .setTypeUrl("type.googleapis.com/" + name)
        .setValue(detail.toByteString())
        .build();
  }
}
