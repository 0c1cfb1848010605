package main

import (
	"fmt"
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A message that contains messages to a greater depth is recursive, which CSI has nowhere.
const maxDepth = 16

// filler sets every field of a message, all to different values as far as their types permit. The variant selects the
// member of each oneof, the value of each enum, and the lengths of lists and maps.
type filler struct {
	variant int
	// The number of values so far.
	count int
}

func (f *filler) fill(message protoreflect.Message, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%s is recursive", message.Descriptor().FullName())
	}
	fields := message.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if oneof := field.ContainingOneof(); oneof != nil {
			members := oneof.Fields()
			if members.Get(f.variant%members.Len()) != field {
				continue
			}
		}
		if err := f.set(message, field, depth); err != nil {
			return err
		}
	}
	return nil
}

func (f *filler) set(message protoreflect.Message, field protoreflect.FieldDescriptor, depth int) error {
	length := 1 + f.variant%3
	switch {
	case field.IsMap():
		entries := message.Mutable(field).Map()
		for range length {
			key, err := f.scalar(field.MapKey(), false)
			if err != nil {
				return err
			}
			value, err := f.scalar(field.MapValue(), isSecret(field))
			if err != nil {
				return err
			}
			entries.Set(key.MapKey(), value)
		}
	case field.IsList():
		list := message.Mutable(field).List()
		for range length {
			if field.Message() != nil {
				if err := f.fill(list.AppendMutable().Message(), depth+1); err != nil {
					return err
				}
				continue
			}
			value, err := f.scalar(field, false)
			if err != nil {
				return err
			}
			list.Append(value)
		}
	case field.Message() != nil:
		return f.fill(message.Mutable(field).Message(), depth+1)
	default:
		value, err := f.scalar(field, false)
		if err != nil {
			return err
		}
		message.Set(field, value)
	}
	return nil
}

// scalar returns the next value for a field that is no message. The Rust half looks for the mark of a secret in what it
// would log.
func (f *filler) scalar(field protoreflect.FieldDescriptor, secret bool) (protoreflect.Value, error) {
	f.count++
	number := int64(f.count)
	switch field.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(f.variant%2 == 0), nil
	case protoreflect.EnumKind:
		values := field.Enum().Values()
		return protoreflect.ValueOfEnum(values.Get(f.variant % values.Len()).Number()), nil
	case protoreflect.Int32Kind:
		numbers := []int64{number, -number, math.MaxInt32, math.MinInt32}
		return protoreflect.ValueOfInt32(int32(numbers[f.variant%len(numbers)])), nil
	case protoreflect.Int64Kind:
		numbers := []int64{number << 33, -number, math.MaxInt64, math.MinInt64}
		return protoreflect.ValueOfInt64(numbers[f.variant%len(numbers)]), nil
	case protoreflect.StringKind:
		text := fmt.Sprintf("%s/%d ü", field.Name(), number)
		if secret {
			text = fmt.Sprintf("SECRET-%d", number)
		}
		return protoreflect.ValueOfString(text), nil
	default:
		return protoreflect.Value{}, fmt.Errorf("no value for %s of kind %s", field.FullName(), field.Kind())
	}
}

func isSecret(field protoreflect.FieldDescriptor) bool {
	secret, _ := proto.GetExtension(field.Options(), csi.E_CsiSecret).(bool)
	return secret
}
