package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// The number of ways to fill a message. It is larger than the number of values of any enum and of members of any
// oneof, so that each one occurs.
const variants = 24

// The largest message that the Rust half may answer with.
const maxAnswer = 1 << 20

// peer is the connection to the Rust half.
type peer struct {
	in  *bufio.Reader
	out *bufio.Writer
}

// exchange sends every published message, empty and filled in all variants, and returns a line for each one that does
// not come back equal.
func exchange(in io.Reader, out io.Writer) ([]string, error) {
	peer := &peer{in: bufio.NewReader(in), out: bufio.NewWriter(out)}
	failed := []string{}
	for _, file := range published {
		lines, err := peer.sendAll(file.Messages())
		failed = append(failed, lines...)
		if err != nil {
			return failed, err
		}
	}
	if err := peer.write(nil); err != nil {
		return failed, err
	}
	return failed, peer.out.Flush()
}

func (p *peer) sendAll(messages protoreflect.MessageDescriptors) ([]string, error) {
	failed := []string{}
	for i := range messages.Len() {
		message := messages.Get(i)
		if message.IsMapEntry() || isRemoved(message) {
			continue
		}
		for variant := -1; variant < variants; variant++ {
			line, err := p.send(message.FullName(), variant)
			if err != nil {
				return failed, fmt.Errorf("%s: %w", message.FullName(), err)
			}
			if line != "" {
				failed = append(failed, line)
				break
			}
		}
		lines, err := p.sendAll(message.Messages())
		failed = append(failed, lines...)
		if err != nil {
			return failed, err
		}
	}
	return failed, nil
}

// send exchanges one message, and returns a line if the answer differs. Variant -1 is the empty message.
func (p *peer) send(name protoreflect.FullName, variant int) (string, error) {
	messageType, err := protoregistry.GlobalTypes.FindMessageByName(name)
	if err != nil {
		return "", err
	}
	sent := messageType.New()
	if variant >= 0 {
		filler := filler{variant: variant}
		if err := filler.fill(sent, 0); err != nil {
			return "", err
		}
	}
	bytes, err := proto.Marshal(sent.Interface())
	if err != nil {
		return "", err
	}
	answer, err := p.call(string(name), bytes)
	if err != nil {
		return "", err
	}
	received := messageType.New()
	if err := proto.Unmarshal(answer, received.Interface()); err != nil {
		return fmt.Sprintf("%s: the answer is no such message: %v", name, err), nil
	}
	clearRemoved(sent)
	if !proto.Equal(sent.Interface(), received.Interface()) {
		return fmt.Sprintf("%s: sent %v, received %v", name, sent.Interface(), received.Interface()), nil
	}
	return "", nil
}

// call sends a frame and reads the answer.
func (p *peer) call(name string, bytes []byte) ([]byte, error) {
	for _, part := range [][]byte{[]byte(name), bytes} {
		if err := p.write(part); err != nil {
			return nil, err
		}
	}
	if err := p.out.Flush(); err != nil {
		return nil, err
	}
	var length uint32
	if err := binary.Read(p.in, binary.BigEndian, &length); err != nil {
		return nil, err
	}
	if length > maxAnswer {
		return nil, fmt.Errorf("an answer of %d bytes", length)
	}
	answer := make([]byte, length)
	_, err := io.ReadFull(p.in, answer)
	return answer, err
}

// write writes a length and the bytes.
func (p *peer) write(bytes []byte) error {
	if err := binary.Write(p.out, binary.BigEndian, uint32(len(bytes))); err != nil {
		return err
	}
	_, err := p.out.Write(bytes)
	return err
}

func isRemoved(message protoreflect.MessageDescriptor) bool {
	for _, name := range removed {
		if string(message.FullName()) == name {
			return true
		}
	}
	return false
}

// clearRemoved clears the fields whose message CSI 1.13 has removed.
func clearRemoved(message protoreflect.Message) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Message() == nil || field.IsMap():
		case isRemoved(field.Message()):
			message.Clear(field)
		case field.IsList():
			for i := range value.List().Len() {
				clearRemoved(value.List().Get(i).Message())
			}
		default:
			clearRemoved(value.Message())
		}
		return true
	})
}
