package penstock

import pb "penstock/v1"

// streamReader checks that a stream keeps the contract: order, sequence numbers, one end.
type streamReader struct {
	point      ResumePoint
	hasOutput  bool
	isComplete bool
	finished   *pb.GenerateResponse
}

// receive takes the next message. It holds `finished` back for end, and then answers nil: it counts
// only once the status is OK.
func (r *streamReader) receive(response *pb.GenerateResponse) (*pb.GenerateResponse, error) {
	if r.finished != nil {
		return nil, streamBroken("a message came after finished")
	}
	sequence := response.GetSequence()
	if sequence != r.point.NextSequence {
		return nil, streamBroken("expected message %d, got %d", r.point.NextSequence, sequence)
	}
	if (sequence == 0) != (response.GetAccepted() != nil) {
		return nil, streamBroken("accepted must come first, and once")
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

// nextPoint is where the next attempt resumes: before a finished whose status was lost.
func (r *streamReader) nextPoint() ResumePoint {
	r.finished = nil
	return r.point
}

// end is the last message, once the stream ended with status OK.
func (r *streamReader) end() (*pb.GenerateResponse, error) {
	if r.finished == nil {
		return nil, streamBroken("the stream ended after %d messages without finished",
			r.point.NextSequence)
	}
	r.point.NextSequence++
	r.isComplete = true
	return r.finished, nil
}
