"""Alibaba Cloud's own client: uses a server, or signs what others have sent. Reads JSON from a file, and fails where something is not as
it should be."""

import json
import sys
from datetime import datetime, timezone

import alibabacloud_oss_v2 as oss
from alibabacloud_oss_v2.signer import SignerV4
from alibabacloud_oss_v2.types import Credentials, HttpRequest, SigningContext


def client(order, **other):
    """What `other` names is otherwise than in the order."""
    order = {**order, **other}
    config = oss.config.load_default()
    config.credentials_provider = oss.credentials.StaticCredentialsProvider(
        order["id"], order["secret"], other.get("token")
    )
    config.region = order["region"]
    config.endpoint = order["endpoint"]
    config.retry_max_attempts = 1
    return oss.Client(config)


def refused(ask):
    """The status and the code of a refusal."""
    try:
        ask()
    except oss.exceptions.OperationError as error:
        error = error.unwrap()
        return [error.status_code, error.code]
    return "not refused"


def use(order):
    bucket, prefix, contents = order["bucket"], order["prefix"], order["contents"]
    us = client(order)
    for name, text in contents.items():
        us.put_object(oss.PutObjectRequest(bucket=bucket, key=prefix + name, body=text.encode()))

    found, token, pages = {}, None, 0
    while token is not None or pages == 0:
        page = us.list_objects_v2(
            oss.ListObjectsV2Request(bucket=bucket, prefix=prefix, max_keys=7, continuation_token=token)
        )
        found |= {item.key.removeprefix(prefix): item for item in page.contents or []}
        token, pages = page.next_continuation_token if page.is_truncated else None, pages + 1
    assert sorted(found) == sorted(contents), (sorted(found), sorted(contents))

    for name, text in contents.items():
        request = oss.GetObjectRequest(
            bucket=bucket,
            key=prefix + name,
            range_header="bytes=1-4",
            range_behavior="standard",
            if_match=found[name].etag,
        )
        part = us.get_object(request)
        assert (part.status_code, part.body.read()) == (206, text.encode()[1:5]), name
        seen = us.head_object(oss.HeadObjectRequest(bucket=bucket, key=prefix + name))
        assert seen.content_length == len(text.encode()), name

    # With a token, which is signed.
    guest = {"id": order["guest"], "token": order["token"]}
    assert client(order, **guest).list_objects_v2(oss.ListObjectsV2Request(bucket=bucket)).key_count

    name = prefix + next(iter(contents))
    stale = oss.GetObjectRequest(bucket=bucket, key=name, if_match='"other"')
    whole = oss.GetObjectRequest(bucket=bucket, key=name)
    refusals = {
        "stale": refused(lambda: us.get_object(stale)),
        "secret": refused(lambda: client(order, secret="wrong").get_object(whole)),
        "id": refused(lambda: client(order, id="stranger").get_object(whole)),
        "region": refused(lambda: client(order, region="cn-elsewhere").get_object(whole)),
        "token": refused(lambda: client(order, **{**guest, "token": "another"}).get_object(whole)),
    }
    return {"found": len(found), "pages": pages, "refusals": refusals}


def sign(order):
    """The Authorization of each request, had the client sent it."""
    credentials = Credentials(order["id"], order["secret"], security_token=order.get("token"))
    signed = []
    for sent in order["requests"]:
        request = HttpRequest(sent["method"], sent["url"], headers=dict(sent["headers"]))
        time = datetime.strptime(sent["headers"]["x-oss-date"], "%Y%m%dT%H%M%SZ")
        context = SigningContext(
            product="oss",
            region=order["region"],
            bucket=order["bucket"],
            key=sent["key"],
            request=request,
            credentials=credentials,
            signing_time=time.replace(tzinfo=timezone.utc),
            # It leaves it to its user which it signs beside those that it must.
            additional_headers={"if-match", "range"},
        )
        SignerV4().sign(context)
        signed.append(request.headers["Authorization"])
    return signed


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:
        print(json.dumps({"use": use, "sign": sign}[sys.argv[1]](json.load(file))))
