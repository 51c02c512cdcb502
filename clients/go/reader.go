package penstock

import pb "penstock/v1"

// streamReader checks that a stream conforms to the protocol: order, sequence numbers, one end.
type streamReader struct {
	point      ResumePoint
	hasOutput  bool
	isComplete bool
	finished   *pb.GenerateResponse
}

// receive checks the next message. It holds `finished` back for end and then returns nil, because
// `finished` is valid only if the status is OK.
func (r *streamReader) receive(response *pb.GenerateResponse) (*pb.GenerateResponse, error) {
	if r.finished != nil {
		return nil, streamBroken("received a message after finished")
	}
	sequence := response.GetSequence()
	if sequence != r.point.NextSequence {
		return nil, streamBroken("expected message %d, got %d", r.point.NextSequence, sequence)
	}
	if (sequence == 0) != (response.GetAccepted() != nil) {
		return nil, streamBroken("accepted must be the first message, once")
	}
	if response.GetFinished() != nil {
		r.finished = response
		return nil, nil
	}
	r.point.NextSequence++
	switch event := response.GetEvent().(type) {
	case *pb.GenerateResponse_Accepted:
		r.point.RequestID = event.Accepted.GetRequestId()
	case *pb.GenerateResponse_Prompt:
		r.hasOutput = true
	case *pb.GenerateResponse_Tokens:
		r.hasOutput = true
		r.point.count(event.Tokens)
	}
	return response, nil
}

// nextPoint returns where the next attempt resumes: before a finished event whose status was lost.
func (r *streamReader) nextPoint() ResumePoint {
	r.finished = nil
	return r.point
}

// end returns the last message, after the stream has ended with status OK.
func (r *streamReader) end() (*pb.GenerateResponse, error) {
	if r.finished == nil {
		return nil, streamBroken("the stream ended after %d messages without finished",
			r.point.NextSequence)
	}
	r.point.NextSequence++
	r.isComplete = true
	return r.finished, nil
}
