"""Tracing: conversion of request records to OpenTelemetry spans."""
