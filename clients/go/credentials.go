package penstock

import (
	"context"
	"errors"
)

// tokenCredentials adds the bearer token to each call.
type tokenCredentials struct {
	token       func() (string, error)
	isEncrypted bool
}

func (c tokenCredentials) GetRequestMetadata(
	context.Context, ...string,
) (map[string]string, error) {
	token, err := c.token()
	if err != nil {
		return nil, err
	}
	if token == "" {
		return nil, errors.New("token: must not be empty")
	}
	for i := 0; i < len(token); i++ {
		if token[i] <= ' ' || token[i] > '~' {
			// The token is not quoted, because the error may be logged.
			return nil, errors.New("token: must be printable ASCII without a space")
		}
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

func (c tokenCredentials) RequireTransportSecurity() bool { return c.isEncrypted }
