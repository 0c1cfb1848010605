package main

import (
	"fmt"
	"os"
	"sort"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// compareDescriptors returns what the published descriptors and those of cleat do not have in common.
func compareDescriptors(path string, earlier bool) ([]string, error) {
	ours, err := load(path)
	if err != nil {
		return nil, err
	}
	theirFacts, ourFacts := facts{}, facts{}
	for _, file := range published {
		theirFacts.addFile(file)
		ours.RangeFilesByPackage(file.Package(), func(file protoreflect.FileDescriptor) bool {
			ourFacts.addFile(file)
			return true
		})
	}
	if len(theirFacts) < 300 {
		return nil, fmt.Errorf("the published descriptors have only %d facts", len(theirFacts))
	}
	missing := theirFacts.without(ourFacts)
	surplus := ourFacts.without(theirFacts)
	if earlier {
		missing = keepExisting(missing)
		surplus = nil
	}
	differences := []string{}
	for _, fact := range missing {
		differences = append(differences, "published, but not in cleat: "+fact)
	}
	for _, fact := range surplus {
		differences = append(differences, "in cleat, but not published: "+fact)
	}
	return differences, nil
}

func load(path string) (*protoregistry.Files, error) {
	bytes, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	set := &descriptorpb.FileDescriptorSet{}
	if err := proto.Unmarshal(bytes, set); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return protodesc.NewFiles(set)
}

// keepExisting drops the facts about what CSI 1.13 has removed.
func keepExisting(all []string) []string {
	kept := []string{}
	for _, fact := range all {
		isRemoved := false
		for _, name := range removed {
			isRemoved = isRemoved || strings.Contains(fact, name)
		}
		if !isRemoved {
			kept = append(kept, fact)
		}
	}
	return kept
}

// facts is a set of lines. Each one states something that both sides of a connection must agree on.
type facts map[string]bool

func (f facts) add(format string, arguments ...any) {
	f[fmt.Sprintf(format, arguments...)] = true
}

// without returns the facts that are not in other, in alphabetical order.
func (f facts) without(other facts) []string {
	lines := []string{}
	for line := range f {
		if !other[line] {
			lines = append(lines, line)
		}
	}
	sort.Strings(lines)
	return lines
}

func (f facts) addFile(file protoreflect.FileDescriptor) {
	f.addMessages(file.Messages())
	f.addEnums(file.Enums())
	for i := range file.Services().Len() {
		service := file.Services().Get(i)
		f.add("service %s", service.FullName())
		for j := range service.Methods().Len() {
			f.addMethod(service.Methods().Get(j))
		}
	}
}

func (f facts) addMethod(method protoreflect.MethodDescriptor) {
	f.add("rpc %s (%s, stream %t) returns (%s, stream %t)", method.FullName(),
		method.Input().FullName(), method.IsStreamingClient(),
		method.Output().FullName(), method.IsStreamingServer())
}

func (f facts) addMessages(messages protoreflect.MessageDescriptors) {
	for i := range messages.Len() {
		message := messages.Get(i)
		if message.IsMapEntry() {
			continue // addField describes the map
		}
		f.add("message %s", message.FullName())
		for j := range message.Fields().Len() {
			f.addField(message.Fields().Get(j))
		}
		for j := range message.ReservedRanges().Len() {
			f.add("reserved %s %v", message.FullName(), message.ReservedRanges().Get(j))
		}
		f.addMessages(message.Messages())
		f.addEnums(message.Enums())
	}
}

func (f facts) addField(field protoreflect.FieldDescriptor) {
	kind := kindOf(field)
	if field.IsMap() {
		kind = fmt.Sprintf("map<%s, %s>", kindOf(field.MapKey()), kindOf(field.MapValue()))
	}
	oneof := ""
	if field.ContainingOneof() != nil {
		oneof = " in oneof " + string(field.ContainingOneof().Name())
	}
	f.add("field %s = %d: %s %s, presence %t, packed %t%s", field.FullName(), field.Number(),
		field.Cardinality(), kind, field.HasPresence(), field.IsPacked(), oneof)
}

func kindOf(field protoreflect.FieldDescriptor) string {
	switch {
	case field.Message() != nil:
		return string(field.Message().FullName())
	case field.Enum() != nil:
		return string(field.Enum().FullName())
	default:
		return field.Kind().String()
	}
}

func (f facts) addEnums(enums protoreflect.EnumDescriptors) {
	for i := range enums.Len() {
		enum := enums.Get(i)
		f.add("enum %s", enum.FullName())
		for j := range enum.Values().Len() {
			value := enum.Values().Get(j)
			f.add("value %s.%s = %d", enum.FullName(), value.Name(), value.Number())
		}
		for j := range enum.ReservedRanges().Len() {
			f.add("reserved %s %v", enum.FullName(), enum.ReservedRanges().Get(j))
		}
	}
}
