package penstock

import (
	"fmt"
	"sort"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// encodingError returns why a message cannot be encoded; nil if it can. This is an error of the caller,
// which gRPC would report as Internal.
func encodingError(message interface{}) *Error {
	m, ok := message.(proto.Message)
	if !ok {
		return nil
	}
	_, err := proto.Marshal(m)
	if err == nil {
		return nil
	}
	return encodingErrorOf(m, err)
}

// encodingErrorOf names the fields that are not UTF-8 by their paths in the request, as servers do. It
// does not quote them, because prompts may be private.
func encodingErrorOf(message proto.Message, cause error) *Error {
	e := &Error{Code: codes.InvalidArgument, Message: cause.Error()}
	for _, path := range notUTF8(message.ProtoReflect(), "") {
		e.FieldViolations = append(e.FieldViolations, FieldViolation{
			Field: strings.TrimPrefix(path, "generation."), Description: "is not valid UTF-8",
		})
	}
	if len(e.FieldViolations) > 0 {
		first := e.FieldViolations[0]
		e.Message = first.Field + ": " + first.Description
	}
	return e
}

// notUTF8 returns the sorted paths of the strings in a message that are not UTF-8.
func notUTF8(message protoreflect.Message, prefix string) (paths []string) {
	check := func(field protoreflect.FieldDescriptor, value protoreflect.Value, path string) {
		switch field.Kind() {
		case protoreflect.StringKind:
			if !utf8.ValidString(value.String()) {
				paths = append(paths, path)
			}
		case protoreflect.MessageKind:
			paths = append(paths, notUTF8(value.Message(), path+".")...)
		}
	}
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		path := prefix + string(field.Name())
		switch {
		case field.IsMap(): // only google.protobuf.Struct has a map, which is not checked
		case field.IsList():
			for i := 0; i < value.List().Len(); i++ {
				check(field, value.List().Get(i), fmt.Sprintf("%s[%d]", path, i))
			}
		default:
			check(field, value, path)
		}
		return true
	})
	sort.Strings(paths)
	return paths
}
