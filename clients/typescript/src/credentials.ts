/**
 * Authentication of client and server: bearer tokens, TLS, mutual TLS. Enforces that a token does
 * not cross a network in plain text.
 */

import { isIPv4 } from "node:net";
import { credentials, type ChannelCredentials } from "@grpc/grpc-js";

/**
 * A bearer token, or a function that returns one. It is called before each call, because tokens
 * expire.
 */
export type Token = string | (() => string | Promise<string>);

/**
 * PEM texts. Without `ca` the certificate authorities of Node are accepted. `cert` and `key` are
 * for mutual TLS.
 */
export interface TlsOptions {
  readonly ca?: Buffer;
  readonly cert?: Buffer;
  readonly key?: Buffer;
}

/** Returns the credentials of connections. Throws TypeError for a certificate without its key. */
export function channelCredentials(tls: boolean | TlsOptions): ChannelCredentials {
  if (tls === false) return credentials.createInsecure();
  const { ca = null, cert = null, key = null } = tls === true ? {} : tls;
  if ((cert === null) !== (key === null)) {
    throw new TypeError("tls: cert and key require each other");
  }
  return credentials.createSsl(ca, key, cert);
}

/** Throws TypeError for a token that would be sent to `target` in plain text. */
export function checkToken(token: Token | undefined, target: string, isEncrypted: boolean): void {
  if (token === undefined) return;
  if (typeof token === "string") checkForm(token);
  if (!isEncrypted && !isLocal(target)) {
    throw new TypeError(
      `token: would cross the network to ${target} in plain text; set tls, or send it as ` +
        "metadata if that is intended",
    );
  }
}

/** Returns the value of the `authorization` metadata. Throws TypeError for an invalid token. */
export async function authorization(token: Token): Promise<string> {
  const text = typeof token === "string" ? token : await token();
  checkForm(text);
  return `Bearer ${text}`;
}

function checkForm(token: string): void {
  // The token is not quoted, because the error may be logged.
  if (!/^[\x21-\x7e]+$/.test(token)) {
    throw new TypeError("token: must be printable ASCII without a space, and not empty");
  }
}

function isLocal(target: string): boolean {
  if (target.startsWith("unix:")) return true;
  const addresses = target.replace(/^(dns|ipv4|ipv6):\/*/, "").split(",");
  return addresses.every((address) => {
    const host = address.replace(/:\d*$/, "").replace(/^\[|\]$/g, "");
    return host === "localhost" || host === "::1" || (isIPv4(host) && host.startsWith("127."));
  });
}
